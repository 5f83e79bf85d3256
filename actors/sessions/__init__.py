"""An engine's end of the sessions with ingresses: messages, server, encoding for other engines."""
