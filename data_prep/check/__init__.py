"""What a finished dataset is: verified, counted, shown."""
