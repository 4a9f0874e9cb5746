"""The Serve deployments: vLLM engines behind Ray Serve LLM's P/D servers, the endpoint in front of them, their actors.

Enter: a checked configuration, HTTP requests. Leave: a bound graph, OpenAI's answers, reports for the autoscaler.
"""
