"""The controller's ingresses: where they run, and starting them anew."""
