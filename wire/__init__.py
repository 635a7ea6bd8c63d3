"""The only package that controller and workers share: messages, frames, sealing, session, mass algebra."""
