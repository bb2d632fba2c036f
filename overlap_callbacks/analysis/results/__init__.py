"""Plain data that is sent between ranks, written to the record and shown; one file per subject."""
