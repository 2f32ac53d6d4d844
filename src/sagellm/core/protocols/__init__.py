"""The contracts between modules, one file each, named after the module that implements it. A module imports
contracts from here and implementations from nowhere; instances arrive through constructors."""
