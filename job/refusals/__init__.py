"""What a job asks for that cannot be, and what it says of which nothing would come: each a key and
what to do."""
