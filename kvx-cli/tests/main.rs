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
mod doctor;
#[cfg(all(feature = "shm", target_os = "linux"))]
#[cfg(test)]
mod ends;
#[cfg(all(feature = "shm", target_os = "linux"))]
#[cfg(test)]
mod limits;
#[cfg(test)]
mod plan_figures;
#[cfg(test)]
mod serve;
#[cfg(test)]
mod shapes;
#[cfg(all(feature = "shm", target_os = "linux"))]
#[cfg(test)]
mod surroundings;
#[cfg(all(feature = "shm", target_os = "linux"))]
#[cfg(test)]
mod top;
