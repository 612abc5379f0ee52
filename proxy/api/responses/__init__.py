"""Translates OpenAI's Responses API, and keeps the responses that later requests go on from."""
