"""`sagellm bench engine`: one engine on fixed workloads, beside other engines' rows."""
