//! The backends that a program finds are those of its features: in a binary, and in a C library that is loaded.
//!
//! Both are this crate's examples, which name no backend themselves. Take a line out of `BUILTIN` and that backend is gone
//! from both: the linker drops a crate that nothing refers to.

#[cfg(test)]
mod registered {
    use std::path::PathBuf;
    use std::process::Command;

    /// Every feature that stands for a backend, and whether it is enabled.
    const FEATURES: &[(&str, bool)] = &[
        ("mock", cfg!(feature = "mock")),
        ("shm", cfg!(feature = "shm")),
        ("ucx", cfg!(feature = "ucx")),
    ];

    fn enabled() -> Vec<&'static str> {
        let mut names: Vec<_> =
            FEATURES.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
        names.sort_unstable();
        names
    }

    /// Where Cargo puts examples: beside the folder of the tests.
    fn example(file: String) -> PathBuf {
        let test = std::env::current_exe().unwrap();
        let path =
            test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(file);
        assert!(
            path.exists(),
            "{} was not built; run all of the crate's tests, or first: cargo build --examples -p kvx-connector",
            path.display()
        );
        path
    }

    #[test]
    fn every_feature_of_the_manifest_is_known_here() {
        let manifest = include_str!("../Cargo.toml");
        let features = manifest
            .lines()
            .skip_while(|line| *line != "[features]")
            .skip(1)
            .take_while(|line| !line.starts_with('['))
            .filter_map(|line| Some((line.split_once(" = ")?, line.contains("dep:kvx-"))))
            .filter(|(_, backend)| *backend)
            .map(|((name, brings), _)| {
                assert_eq!(brings, format!("[\"dep:kvx-{name}\"]"));
                name
            });
        let features: Vec<_> = features.collect();
        assert_eq!(features, FEATURES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }

    #[test]
    fn this_program_has_the_backends_of_its_features() {
        let names = |list: &[&kvx_core::registry::Registration]| {
            list.iter().map(|one| one.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&kvx_connector::backends().unwrap()), enabled());
        assert_eq!(names(&kvx_core::registry::registered().unwrap()), enabled());
        assert_eq!(kvx_connector::BUILTIN.len(), enabled().len());
    }

    #[test]
    fn a_binary_has_the_backends_of_its_features() {
        let path = example(format!("names{}", std::env::consts::EXE_SUFFIX));
        let output = Command::new(path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(printed.lines().collect::<Vec<_>>(), enabled());
    }

    #[test]
    fn a_c_library_has_the_backends_of_its_features() {
        type Names = unsafe extern "C" fn(*mut u8, usize) -> isize;
        let path = example(format!(
            "{}names_library{}",
            std::env::consts::DLL_PREFIX,
            std::env::consts::DLL_SUFFIX
        ));
        // SAFETY: it is this crate's own example; what it runs when it is loaded is the registration of backends.
        let library = unsafe { libloading::Library::new(path) }.unwrap();
        // SAFETY: the example defines the function with this signature.
        let names = unsafe { library.get::<Names>("kvx_backend_names") }.unwrap();
        let mut buffer = [0; 4096];
        // SAFETY: the buffer is as long as is said.
        let bytes = unsafe { names(buffer.as_mut_ptr(), buffer.len()) };
        let bytes = usize::try_from(bytes).expect("the registry is in order");
        let written = std::str::from_utf8(&buffer[..bytes]).unwrap();
        assert_eq!(written.lines().collect::<Vec<_>>(), enabled());
    }
}
