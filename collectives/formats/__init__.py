"""Other people's descriptions of collectives, read into a `Schedule`: one file a format."""
