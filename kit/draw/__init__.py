"""Drawing tools that know no lab: themes, pictures, the plots of any run, and runs compared."""
