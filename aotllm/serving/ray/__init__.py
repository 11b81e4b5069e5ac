"""Replicas of a server on Ray Serve, with requests going where their prefix is cached. Needs the extra `ray`."""
