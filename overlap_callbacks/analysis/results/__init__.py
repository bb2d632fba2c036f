"""Plain data, as it travels between ranks, stands in the record and is shown."""
