"""The messages of `inference.GRPCInferenceService`."""
