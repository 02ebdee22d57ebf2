"""Cache groups, pages, the radix tree of prefixes, and the layout of keys and values in memory."""
