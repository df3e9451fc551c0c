"""`python -m vlcache_hf`: the command `vlcache`, where its script is not on the path."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="vlcache")
