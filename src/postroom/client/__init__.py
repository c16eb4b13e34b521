"""The SDK. What is public is in `postroom` itself."""
