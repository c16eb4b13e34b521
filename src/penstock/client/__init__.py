"""The SDK. What is public is in `penstock` itself."""
