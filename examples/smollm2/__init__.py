"""A small chat model that a package ships, and the chats of a harbour pilot to tune it on."""
