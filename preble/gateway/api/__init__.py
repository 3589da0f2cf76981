"""The gateway's endpoints, one file an API: OpenAI's, SGLang's, the admin's, the dashboard's."""
