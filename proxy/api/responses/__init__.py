"""Translates OpenAI's Responses API, and keeps responses for requests that continue them."""
