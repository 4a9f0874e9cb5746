"""The Serve deployments: real engines behind Ray Serve LLM's P/D servers, and the ingress in front of them."""
