"""How experience moves and rests: environments, sequences, shards, store, replay. No torch and no algorithm in here."""
