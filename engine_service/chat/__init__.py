"""Chats: from messages to a prompt with the model's template, and from an output to content, reasoning and tool calls."""
