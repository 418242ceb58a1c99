"""The publisher that makes a node's pool in the API equal to its inventory."""
