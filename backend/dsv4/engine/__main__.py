"""`python -m dsv4.engine`: started by `dsv4.engine.client.EngineClient`, not by hand."""

from dsv4.engine.process import main

if __name__ == "__main__":
    main()
