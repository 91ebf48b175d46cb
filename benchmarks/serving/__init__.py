"""What the services add around the engines."""
