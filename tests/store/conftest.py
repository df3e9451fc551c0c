from servers import _shared_server, fake, server, start_server

__all__ = ["_shared_server", "fake", "server", "start_server"]
