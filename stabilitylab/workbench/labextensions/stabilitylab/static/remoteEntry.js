/* The launcher tile of JupyterLab 4, as a container of module federation written by hand: no build step.
   https://jupyterlab.readthedocs.io/en/stable/extension/extension_dev.html#prebuilt-extensions */
"use strict";
(() => {
  const CELLS = [
    "from stabilitylab import Workbench\n\nrun = \"\"  # a log, a run folder, a record, or the address of a tracker",
    "Workbench(run)",
  ];
  const ICON = "data:image/svg+xml," + encodeURIComponent(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke-width="2" stroke-linejoin="round">' +
    '<path stroke="#888" stroke-width="1.5" d="M3 3v18h18"/><path stroke="#d1495b" d="M5 9c4 6 5 7 7 7l2-11 2 12 5 1"/></svg>');
  let shared = {};

  const load = async (name) => {
    const versions = shared[name];
    if (!versions) throw new Error(`JupyterLab shares no ${name}`);
    return (await Object.values(versions)[0].get())();
  };

  const notebook = () => ({
    cells: CELLS.map((source, i) => ({
      cell_type: "code", execution_count: null, id: `workbench-${i}`, metadata: {}, outputs: [], source,
    })),
    metadata: {}, nbformat: 4, nbformat_minor: 5,
  });

  const activate = (app, launcher) => {
    const command = "stabilitylab:open-workbench";
    app.commands.addCommand(command, {
      label: "Unstable run",
      caption: "A notebook with stabilitylab's workbench: what went wrong in a training run",
      execute: async (args) => {
        const contents = app.serviceManager.contents;
        const made = await contents.newUntitled({ path: args.cwd || "", type: "notebook" });
        await contents.save(made.path, { type: "notebook", format: "json", content: notebook() });
        await app.serviceManager.kernelspecs.ready;
        const kernel = { name: app.serviceManager.kernelspecs.specs?.default };
        return app.commands.execute("docmanager:open", { path: made.path, factory: "Notebook", kernel });
      },
    });
    launcher.add({ command, category: "Notebook", rank: 10, kernelIconUrl: ICON });
  };

  /* The one cell that `stabilitylab lab` writes: paths as plain strings and nothing else, so that no other code
     of a notebook ever runs by being opened. */
  const TEXT = "(?:'[^'\\\\\\n]*'|\"[^\"\\\\\\n]*\")";
  const CELL = new RegExp(
    `^from stabilitylab import Workbench\\n\\nWorkbench\\((?:${TEXT}|\\[${TEXT}(?:, ${TEXT})*\\]), remember=${TEXT}\\)$`);

  const runOnce = async (app, panel) => {
    await panel.context.ready;
    const model = panel.content.model;
    const cells = Array.from(model.cells);
    const asked = model.getMetadata("stabilitylab");
    if (!asked || asked.run !== true || cells.length !== 1 || !CELL.test(cells[0].sharedModel.getSource())) return;
    await panel.sessionContext.ready;
    app.shell.activateById(panel.id);
    await app.commands.execute("notebook:run-all-cells");
  };

  const plugins = async () => {
    const { ILauncher } = await load("@jupyterlab/launcher");
    const { INotebookTracker } = await load("@jupyterlab/notebook");
    return [{
      id: "stabilitylab:launcher",
      description: "A tile in the launcher that opens a notebook with the workbench.",
      autoStart: true,
      requires: [ILauncher],
      activate,
    }, {
      id: "stabilitylab:run",
      description: "Runs the cell of a notebook that `stabilitylab lab` wrote.",
      autoStart: true,
      requires: [INotebookTracker],
      activate: (app, tracker) => { tracker.widgetAdded.connect((_, panel) => void runOnce(app, panel)); },
    }];
  };

  (window._JUPYTERLAB = window._JUPYTERLAB || {}).stabilitylab = {
    init: (scope) => { shared = scope; },
    get: async () => { const made = await plugins(); return () => ({ __esModule: true, default: made }); },
  };
})();
