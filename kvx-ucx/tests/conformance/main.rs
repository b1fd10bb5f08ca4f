//! The backend keeps the contract: in one process, in two, and in two network namespaces; over TCP alone, with CMA for the data,
//! over shared memory alone, and over whatever UCX chooses. With the library that `KVX_UCX_LIB` names.

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod subject;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
kvx_tests::conformance!(subject::Ucx);

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn main() {}
