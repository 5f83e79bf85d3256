"""Between protobuf messages and the values that raypd works with."""
