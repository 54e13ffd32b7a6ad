"""Problems, models, devices and builds that several rooms of the test suite share."""
