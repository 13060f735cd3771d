"""Files on the user's side: weights as others write and read them, shards, exports, and the records
of a run."""
