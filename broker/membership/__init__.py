"""Who is here: members, their leases, their incarnations, and how fast they are taken to be."""
