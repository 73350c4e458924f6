"""Rule files that come with the package: see `key_rules`."""
