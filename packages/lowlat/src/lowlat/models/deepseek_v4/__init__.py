"""DeepSeek-V4-Flash and V4.1-Flash: text model, DSpark draft, published weight format."""
