"""The tests. A package, so that worker processes can import what a test file defines by its name."""
