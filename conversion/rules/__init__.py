"""Rule files that come with the package: see `rule_file`."""
