"""Interview preparation: numeric questions, claims and answers, checked by the library."""
