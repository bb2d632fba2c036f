"""Plain data, as it is sent between ranks, written to the record and shown."""
