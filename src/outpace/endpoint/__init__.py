"""The client's side of the OpenAI API."""
