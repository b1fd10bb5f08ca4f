//! Tests of the program as it is built.

#[cfg(test)]
mod bench;
#[cfg(test)]
mod command_line;
#[cfg(test)]
mod common;
#[cfg(test)]
mod demo;
#[cfg(test)]
mod plan_figures;
