"""What ranks do for the probes: standard library, torch and Megatron only. They measure and return plain numbers; `probes` judges."""
