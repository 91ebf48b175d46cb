"""The OpenAI HTTP door: takes HTTP requests, asks the routers, and streams their answers back."""
