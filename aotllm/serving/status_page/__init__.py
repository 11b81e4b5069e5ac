"""A page with live figures and a chat, for people."""
