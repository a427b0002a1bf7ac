"""What processes say to one another: NATS subjects and bus, gRPC channels and servers, generated messages."""
