"""Files on the user's side: weights as others write and read them, shards, exports, and the records
of a run."""

__all__ = [
    "columns",
    "exported",
    "records",
    "row_file",
    "sending",
    "shards",
    "uplink",
    "web_folder",
    "weight_files",
    "weight_writer",
]
