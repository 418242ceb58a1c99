"""Generated protobuf messages; made by `make proto` from proto/."""
