"""What follows the loss of an instance, a router or a client's connection, for the requests that it had."""
