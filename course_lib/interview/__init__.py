"""What a candidate is asked: common claims about parallel training, each with an executable check."""
