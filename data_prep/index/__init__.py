"""What `data_prep index` is made of: which shards, how they are fetched, what is in them."""
