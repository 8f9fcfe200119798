"""Interview preparation: common claims about parallel training, each with its check."""
