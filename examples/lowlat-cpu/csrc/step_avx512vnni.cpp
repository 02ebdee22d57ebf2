// The step for one instruction set; the flags are in setup.py.
#include "step.cpp"
