"""Routes of the REST API, one file a group."""
